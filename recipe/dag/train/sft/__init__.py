"""Supervised fine-tuning of one model on transcripts, by verl's SFT trainer."""

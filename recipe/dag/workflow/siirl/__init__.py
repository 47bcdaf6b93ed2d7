"""siiRL's workflow files in this language. `translate` is the way in; the others are its parts."""

"""A run as one page that a browser opens from disk: `verl-dag trace RUN -o trace.html`.

Invariant: the page is one file, loads nothing and sends nothing. Whatever a record holds reaches it as compressed JSON,
never as markup, and is shown as text. `web/` has the page's modules, which are joined here without a build step.
"""

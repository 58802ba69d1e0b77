"""Fixes to other people's code, each in a module that says for what, why, and until when."""

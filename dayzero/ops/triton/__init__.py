"""Variants written in Triton. Files are named as the references' are; nothing here is imported until it is bound."""

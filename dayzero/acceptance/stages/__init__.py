"""The stages of an acceptance, one file each. A stage is a list of findings and the figures that show them."""

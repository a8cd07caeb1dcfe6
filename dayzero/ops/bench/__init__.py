"""``python -m dayzero.ops.bench``: what each variant takes at real shapes, against its floor and against peers."""

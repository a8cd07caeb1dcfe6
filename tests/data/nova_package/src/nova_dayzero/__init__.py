"""What a package outside the tree brings: a family with a mixer and a channel of its own, two operators, a device."""

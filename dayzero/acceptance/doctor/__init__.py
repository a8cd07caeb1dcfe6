"""Which layer is at fault when a model will not run: by a record, by a checkpoint on paper, a server, this machine."""

"""Release day as one resumable pipeline: from waiting for a checkpoint to its acceptance record."""

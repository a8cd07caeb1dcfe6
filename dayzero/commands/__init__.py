"""One small file a command: its options as a frozen value, and a body that imports its work only when it runs."""

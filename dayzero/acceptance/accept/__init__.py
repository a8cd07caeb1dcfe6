"""One command, one record: stages of checks over one subject, resumable, with a digest and a page."""

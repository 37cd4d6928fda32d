"""One self-contained page about a recording, to share: no scripts or styles from elsewhere, and none may be loaded."""

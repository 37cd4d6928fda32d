"""What the screens show, as plain data: no module here imports Textual or Rich."""

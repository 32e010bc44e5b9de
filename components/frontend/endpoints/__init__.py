"""The models that a frontend serves: the revisions on the board, which come and go while it runs."""

"""From plain text to fixed-shape batches: prose, a WordPiece vocabulary, sentence pairs and masked words."""

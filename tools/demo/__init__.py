"""The demo model: its pictures, its questions, its training, its export."""

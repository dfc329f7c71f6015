"""Runs, task vectors and models as repositories on the Hub, each with a card."""

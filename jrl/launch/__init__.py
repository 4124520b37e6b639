"""Runs of several processes: how they find each other, and who notices when one is gone."""

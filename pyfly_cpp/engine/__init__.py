"""A loaded model and the requests that run on it."""

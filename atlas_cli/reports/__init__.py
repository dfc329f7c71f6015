"""Tables, charts and the page that shows runs."""

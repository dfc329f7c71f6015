"""One page of HTML that needs nothing but itself: pictures and tables of learning runs."""

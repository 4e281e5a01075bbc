"""What a run says about itself: events and their one-line reports."""

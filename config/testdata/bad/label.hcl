job "${var.x}" {}

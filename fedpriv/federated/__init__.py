"""One round as pure functions, the plan that governs it, and the loop around it."""

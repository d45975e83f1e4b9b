"""Tensor functions, one folder each: the public function and its implementations."""

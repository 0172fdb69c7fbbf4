"""Kernel-level tools: resources, replay, Nsight and sanitizer scripts."""

"""Kernel-level tools: resources, Nsight and sanitizer scripts."""

//go:build nodocker

package taskdriver

// containerConfig is unused: the parent process runs no container.
type containerConfig struct{}

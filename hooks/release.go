//go:build !next

package hooks

// NextFields are what the next release knows of a csi_plugin besides: release_next.go, beside this file, has them.
type NextFields struct{}

func (NextFields) checkNext(PluginSpec) error { return nil }

func (NextFields) prepareNext(Layout, AllocTask, *Preparation) {}

//go:build !next

package config

import "holdfast/hooks"

const sealedVersion = subPathsVersion

// What the next release knows of a csi_plugin besides: release_next.go, beside this file, has it.
var nextPluginAttrs []string

func (f *file) nextPlugin(*fields, *hooks.PluginSpec) {}

func leastNext(sealed) int { return firstVersion }

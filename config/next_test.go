package config

import "testing"

// nextFiles are files that only the next release accepts.
var nextFiles []string

// TestFieldOfTheNextRelease: this release does not know the field, and refuses the whole text.
func TestFieldOfTheNextRelease(t *testing.T) {
	for _, name := range matches(t, "testdata/next/*.hcl", 1) {
		got, ds := parse(name, read(t, name))
		if got != nil || ds.Err() == nil {
			t.Errorf("%s was accepted", name)
		}
		golden(t, name[:len(name)-len(".hcl")]+".refused", formatted(ds))
	}
}

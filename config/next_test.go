package config

import "testing"

// nextFiles are good ones by the next release only.
var nextFiles []string

// TestFieldOfTheNextRelease: it is an unknown one, and the text is refused as a whole.
func TestFieldOfTheNextRelease(t *testing.T) {
	for _, name := range matches(t, "testdata/next/*.hcl", 1) {
		got, ds := parse(name, read(t, name))
		if got != nil || ds.Err() == nil {
			t.Errorf("%s was accepted", name)
		}
		golden(t, name[:len(name)-len(".hcl")]+".refused", told(ds))
	}
}

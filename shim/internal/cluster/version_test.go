package cluster

import "testing"

func TestOutdatedVersionsOfEtcd(t *testing.T) {
	for version, want := range map[string]bool{
		"3.4.23": true, "3.5.27": true, "3.5.28": false, "3.6.8": true, "3.6.9": false, "3.7.0-rc.1": false,
		"4.0.0": false, "": false,
	} {
		if outdated(version) != want {
			t.Errorf("version %q: outdated is %v, want %v", version, !want, want)
		}
	}
}

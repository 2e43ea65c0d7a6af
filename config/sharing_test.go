package config

import (
	"fmt"
	"strings"
	"testing"

	"holdfast/registry"
)

// twice returns a job with a group of count allocs that request one volume under two names.
func twice(count int, mode registry.AccessMode, first, second bool) string {
	const request = `    volume %q {
      type            = "csi"
      source          = "s"
      access_mode     = %q
      attachment_mode = "file-system"
      read_only       = %t
    }
`
	return fmt.Sprintf("job \"x\" {\n  group \"g\" {\n    count = %d\n", count) +
		fmt.Sprintf(request, "a", mode, first) +
		fmt.Sprintf(request, "b", mode, second) + "    task \"t\" { driver = \"exec\" }\n  }\n}"
}

// TestVolumeUnderTwoNames: one alloc may have two requests of a volume unless their modes conflict.
func TestVolumeUnderTwoNames(t *testing.T) {
	for mode, want := range map[registry.AccessMode]string{ // by access_modes.go of package controller, for one alloc
		registry.SingleNodeWriter:       "one user",
		registry.SingleNodeReaderOnly:   "one user",
		registry.SingleNodeSingleWriter: "one user",
		registry.SingleNodeMultiWriter:  "",
		registry.MultiNodeReaderOnly:    "",
		registry.MultiNodeSingleWriter:  "one writer",
		registry.MultiNodeMultiWriter:   "",
	} {
		for _, ro := range [][2]bool{{false, false}, {false, true}, {true, false}, {true, true}} {
			legal := want == "" || want == "one writer" && (ro[0] || ro[1])
			_, ds := ParseJob(Source{"x.hcl", []byte(twice(1, mode, ro[0], ro[1]))}, Options{})
			if got := strings.Contains(fmt.Sprint(ds), "are the same volume"); got == legal {
				t.Errorf("%s, read-only %v: %v", mode, ro, ds)
			}
			lacksReadOnly := mode.ReaderOnly() && !(ro[0] && ro[1])
			if (ds.Err() == nil) != (legal && !lacksReadOnly) {
				t.Errorf("%s, read-only %v: %v", mode, ro, ds)
			}
		}
	}
}

// TestCountSharesAVolume checks which access modes several allocs of a group may use without per_alloc (CSI spec,
// VolumeCapability.AccessMode).
func TestCountSharesAVolume(t *testing.T) {
	for mode, want := range map[registry.AccessMode]string{
		registry.SingleNodeWriter:       `the 2 allocs of group "g" cannot share`,
		registry.SingleNodeReaderOnly:   `the 2 allocs of group "g" cannot share`,
		registry.SingleNodeSingleWriter: `the 2 allocs of group "g" cannot share`,
		registry.SingleNodeMultiWriter:  `the 2 allocs of group "g" cannot share`,
		registry.MultiNodeSingleWriter:  `only one of the 2 allocs of group "g" could write`,
		registry.MultiNodeReaderOnly:    "",
		registry.MultiNodeMultiWriter:   "",
	} {
		// the second block is no request, as its name is taken
		text := strings.Replace(twice(2, mode, mode.ReaderOnly(), true), `volume "b"`, `volume "a"`, 1)
		_, ds := ParseJob(Source{"x.hcl", []byte(text)}, Options{})
		if got := fmt.Sprint(ds); strings.Contains(got, "allocs of group") != (want != "") ||
			!strings.Contains(got, want) {
			t.Errorf("%s: %v\nwant %s", mode, ds, want)
		}
		each := strings.ReplaceAll(text, `source          = "s"`, "source = \"s\"\nper_alloc = true")
		if _, ds := ParseJob(Source{"x.hcl", []byte(each)}, Options{}); strings.Contains(fmt.Sprint(ds),
			"allocs of group") {
			t.Errorf("%s with per_alloc: %v", mode, ds)
		}
	}
}

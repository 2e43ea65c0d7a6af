package sanity

import "strings"

// A skip is a reason why the specs with this prefix do not run.
type skip struct{ spec, why string }

// always lists what no configuration runs.
var always = []skip{
	{"CreateSnapshot [Controller Server] should succeed when creating a snapshot with accessibility requirements",
		"every node of a loopfs reaches all of its snapshots"},
	{"Controller Service [Controller Server] ListVolumes pagination should detect volumes added between pages",
		"csi-sanity marks it as pending; TestListPages of loopfs covers it"},
	{"Controller Service [Controller Server] ControllerPublishVolume ", "the volumes of one node need no attaching"},
	{"Controller Service [Controller Server] ControllerUnpublishVolume ", "as above"},
	{"Controller Service [Controller Server] volume lifecycle ", "as above"},
}

// ofDirectories lists what the dir backend does not announce.
var ofDirectories = []skip{
	{"ModifyVolume ", "a directory has no mutable parameters"},
	{"Controller Service [Controller Server] CreateVolume should create volume with a volume attribute class",
		"as above"},
	{"Controller Service [Controller Server] CreateVolume should not create volume with an invalid volume attribute " +
		"class", "as above"},
}

// allowed returns the skip of a spec.
func allowed(list []skip, spec string) (int, bool) {
	for i, s := range list {
		if strings.HasPrefix(spec, s.spec) {
			return i, true
		}
	}
	return 0, false
}

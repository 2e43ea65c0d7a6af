package sanity

import "strings"

// A skip is why specs whose text begins so do not run.
type skip struct{ spec, why string }

// always is what no configuration runs.
var always = []skip{
	{"GroupController Service ", "loopfs takes no snapshots of groups of volumes"},
	{"ModifyVolume ", "loopfs has no parameters that could be changed"},
	{"Controller Service [Controller Server] CreateVolume should create volume with a volume attribute class",
		"as above"},
	{"Controller Service [Controller Server] CreateVolume should not create volume with an invalid volume attribute class", "as above"},
	{"ControllerGetVolumeHealth ", "loopfs knows nothing of a volume's health that an error of its calls does not say"},
	{"ControllerListVolumeHealth ", "as above"},
	{"Node Service NodeGetVolumeHealth ", "as above"},
	{"Node Service NodeGetStorageHealth ", "as above"},
	{"CreateSnapshot [Controller Server] should succeed when creating a snapshot with accessibility requirements",
		"every node of a loopfs reaches all of its snapshots"},
	{"Controller Service [Controller Server] ListVolumes pagination should detect volumes added between pages",
		"csi-sanity does not run it itself; loopfs' own TestListPages does"},
}

// unattached is what needs --attach.
var unattached = []skip{
	{"Controller Service [Controller Server] ControllerPublishVolume ", "started without --attach"},
	{"Controller Service [Controller Server] ControllerUnpublishVolume ", "as above"},
	{"Controller Service [Controller Server] volume lifecycle ", "as above"},
}

// unlimited is what needs --max-volumes.
var unlimited = []skip{
	{"Controller Service [Controller Server] ControllerPublishVolume should fail when publishing more volumes than the node max attach limit",
		"started without --max-volumes"},
}

// allowed finds the skip that a spec is on.
func allowed(list []skip, spec string) (int, bool) {
	for i, s := range list {
		if strings.HasPrefix(spec, s.spec) {
			return i, true
		}
	}
	return 0, false
}

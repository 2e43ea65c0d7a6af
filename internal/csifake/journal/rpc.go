package journal

// needs maps optional RPCs to the capability that the plugin must have announced.
// Source: CSI spec 1.13.0, the enums of PluginCapability, ControllerServiceCapability, NodeServiceCapability and
// GroupControllerServiceCapability.
var needs = map[string]string{
	"CreateVolume":               "controller/CREATE_DELETE_VOLUME",
	"DeleteVolume":               "controller/CREATE_DELETE_VOLUME",
	"ControllerPublishVolume":    "controller/PUBLISH_UNPUBLISH_VOLUME",
	"ControllerUnpublishVolume":  "controller/PUBLISH_UNPUBLISH_VOLUME",
	"ListVolumes":                "controller/LIST_VOLUMES",
	"GetCapacity":                "controller/GET_CAPACITY",
	"CreateSnapshot":             "controller/CREATE_DELETE_SNAPSHOT",
	"DeleteSnapshot":             "controller/CREATE_DELETE_SNAPSHOT",
	"ListSnapshots":              "controller/LIST_SNAPSHOTS",
	"GetSnapshot":                "controller/GET_SNAPSHOT",
	"ControllerExpandVolume":     "controller/EXPAND_VOLUME",
	"ControllerGetVolume":        "controller/GET_VOLUME",
	"ControllerModifyVolume":     "controller/MODIFY_VOLUME",
	"ControllerGetVolumeHealth":  "controller/GET_VOLUME_HEALTH",
	"ControllerListVolumeHealth": "controller/LIST_VOLUME_HEALTH",
	"ControllerGetCapabilities":  "service/CONTROLLER_SERVICE",

	"GroupControllerGetCapabilities": "service/GROUP_CONTROLLER_SERVICE",
	"CreateVolumeGroupSnapshot":      "group/CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT",
	"DeleteVolumeGroupSnapshot":      "group/CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT",
	"GetVolumeGroupSnapshot":         "group/CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT",
	"GetMetadataAllocated":           "service/SNAPSHOT_METADATA_SERVICE",
	"GetMetadataDelta":               "service/SNAPSHOT_METADATA_SERVICE",

	"NodeStageVolume":      "node/STAGE_UNSTAGE_VOLUME",
	"NodeUnstageVolume":    "node/STAGE_UNSTAGE_VOLUME",
	"NodeGetVolumeStats":   "node/GET_VOLUME_STATS",
	"NodeExpandVolume":     "node/EXPAND_VOLUME",
	"NodeGetVolumeHealth":  "node/GET_VOLUME_HEALTH",
	"NodeGetStorageHealth": "node/GET_STORAGE_HEALTH",
}

// Needs returns the capability that an RPC requires, as "service/NAME". It is empty for an RPC that every plugin has.
func Needs(rpc string) string { return needs[rpc] }

// undoes are the calls that undo something.
var undoes = map[string]bool{"DeleteVolume": true, "ControllerUnpublishVolume": true, "NodeUnstageVolume": true,
	"NodeUnpublishVolume": true, "DeleteSnapshot": true, "DeleteVolumeGroupSnapshot": true}

// Mutates reports whether an RPC changes a volume.
func Mutates(rpc string) bool {
	switch rpc {
	case "CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", "ControllerExpandVolume",
		"NodeExpandVolume", "ControllerModifyVolume", "CreateSnapshot", "CreateVolumeGroupSnapshot":
		return true
	}
	return undoes[rpc]
}

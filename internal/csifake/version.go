package csifake

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// newest is the minor version of CSI on which this package is built. A plugin of a later version has capabilities and
// fields that this package does not know.
const newest = 13

// added lists the capabilities and fields that CSI has added after version 1.0, by minor version (csi.proto of each
// release). An RPC depends on its capability. A new message depends on its RPC, or on the field that holds it.
var added = map[int][]string{
	1: {"controller/EXPAND_VOLUME", "node/EXPAND_VOLUME", "expansion/ONLINE", "expansion/OFFLINE",
		"PluginCapability.volume_expansion"},
	2: {"controller/LIST_VOLUMES_PUBLISHED_NODES", "ControllerExpandVolumeRequest.volume_capability",
		"ListSnapshotsRequest.secrets", "ListVolumesResponse.Entry.status",
		"NodeExpandVolumeRequest.staging_target_path", "NodeExpandVolumeRequest.volume_capability",
		"NodeGetVolumeStatsRequest.staging_target_path"},
	3: {"controller/GET_VOLUME", "controller/VOLUME_CONDITION", "node/VOLUME_CONDITION"},
	4: {"GetCapacityResponse.maximum_volume_size", "GetCapacityResponse.minimum_volume_size"},
	5: {"controller/SINGLE_NODE_MULTI_WRITER", "node/SINGLE_NODE_MULTI_WRITER", "node/VOLUME_MOUNT_GROUP",
		"NodeExpandVolumeRequest.secrets", "VolumeCapability.MountVolume.volume_mount_group"},
	8: {"group/CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT", "service/GROUP_CONTROLLER_SERVICE",
		"Snapshot.group_snapshot_id"},
	9: {"controller/MODIFY_VOLUME", "CreateVolumeRequest.mutable_parameters",
		"ValidateVolumeCapabilitiesRequest.mutable_parameters",
		"ValidateVolumeCapabilitiesResponse.Confirmed.mutable_parameters"},
	10: {"service/SNAPSHOT_METADATA_SERVICE"},
	12: {"controller/GET_SNAPSHOT"},
	13: {"controller/GET_VOLUME_HEALTH", "controller/LIST_VOLUME_HEALTH", "node/GET_VOLUME_HEALTH",
		"node/GET_STORAGE_HEALTH", "service/SNAPSHOT_ACCESSIBILITY_CONSTRAINTS",
		"CreateSnapshotRequest.accessibility_requirements", "Snapshot.accessible_topology"},
}

// removed lists the capabilities that CSI has removed, by the last version that had them.
var removed = map[int][]string{12: {"controller/VOLUME_CONDITION", "node/VOLUME_CONDITION"}}

// Versions lists the versions of CSI that a plugin can speak: all that this build knows, and a future one.
func Versions() (all []string) {
	for minor := range newest + 2 {
		all = append(all, fmt.Sprintf("1.%d", minor))
	}
	return all
}

// version is the CSI version on which a plugin is built, by its minor number. The zero value means that everything in
// this package is available.
type version struct {
	minor   int
	limited bool
	lacks   map[string]bool // capabilities, and fields of messages
}

func parseVersion(s string) (v version, err error) {
	if s == "" {
		return v, nil
	}
	if !slices.Contains(Versions(), s) {
		return v, fmt.Errorf("csifake: unknown version %q of CSI; it is one of %s", s, strings.Join(Versions(), ", "))
	}
	v.minor, err = strconv.Atoi(strings.TrimPrefix(s, "1."))
	v.limited, v.lacks = true, map[string]bool{}
	for minor, names := range added {
		for _, name := range names {
			v.lacks[name] = minor > v.minor
		}
	}
	for minor, names := range removed {
		for _, name := range names {
			v.lacks[name] = v.lacks[name] || v.minor > minor
		}
	}
	return v, err
}

// future reports whether the version is newer than this package.
func (v version) future() bool { return v.minor > newest }

// unknownNumber is the number of a capability and a field that no version of CSI has.
const unknownNumber = 9999

// limit leaves out the capabilities that the version does not have, and adds an unknown one to each service.
func (v version) limit(caps capSets) {
	if !v.limited {
		return
	}
	for service, numbers := range caps {
		caps[service] = slices.DeleteFunc(numbers, func(n int32) bool {
			return slices.ContainsFunc(v.missing(service), func(name string) bool {
				number, _ := capNumber(service, name)
				return number == n
			})
		})
	}
	if v.future() {
		for _, service := range []string{"service", "controller", "group", "node"} {
			caps[service] = append(caps[service], unknownNumber)
		}
	}
}

// missing returns the names of the capabilities of a service that the version lacks.
func (v version) missing(service string) (names []string) {
	for full, lacks := range v.lacks {
		if of, name, is := strings.Cut(full, "/"); is && lacks && of == service {
			names = append(names, name)
		}
	}
	return names
}

// requestFor returns a request as a plugin of the version reads it: fields that the version lacks are unknown.
func (v version) requestFor(req proto.Message) proto.Message {
	if !v.limited {
		return req
	}
	req = proto.Clone(req)
	v.strip(req.ProtoReflect())
	return req
}

// reply returns an answer without the fields that the version lacks.
func (v version) reply(answer proto.Message) proto.Message {
	if !v.limited {
		return answer
	}
	m := answer.ProtoReflect()
	v.strip(m)
	if v.future() {
		field := protowire.AppendString(protowire.AppendTag(nil, unknownNumber, protowire.BytesType),
			"of a later version")
		m.SetUnknown(append(m.GetUnknown(), field...))
	}
	return answer
}

func (v version) strip(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		name := strings.TrimPrefix(string(m.Descriptor().FullName()), "csi.v1.") + "." + string(f.Name())
		switch {
		case v.lacks[name]:
			m.Clear(f)
		case f.Message() == nil || f.IsMap():
		case f.IsList():
			for i := range value.List().Len() {
				v.strip(value.List().Get(i).Message())
			}
		default:
			v.strip(value.Message())
		}
		return true
	})
}

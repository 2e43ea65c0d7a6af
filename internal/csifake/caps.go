package csifake

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

// AllCaps are all capabilities of CSI 1.13.0 for volumes and snapshots, except alpha ones.
var AllCaps = []string{"CREATE_DELETE_VOLUME", "PUBLISH_UNPUBLISH_VOLUME", "STAGE_UNSTAGE_VOLUME", "LIST_VOLUMES",
	"LIST_VOLUMES_PUBLISHED_NODES", "GET_CAPACITY", "CREATE_DELETE_SNAPSHOT", "LIST_SNAPSHOTS", "CLONE_VOLUME",
	"PUBLISH_READONLY", "EXPAND_VOLUME", "MODIFY_VOLUME", "GET_VOLUME_STATS", "VOLUME_MOUNT_GROUP"}

// shortCaps maps common short names to the full names of capabilities.
var shortCaps = map[string]string{"CREATE_DELETE": "CREATE_DELETE_VOLUME",
	"PUBLISH_UNPUBLISH": "PUBLISH_UNPUBLISH_VOLUME",
	"STAGE_UNSTAGE":     "STAGE_UNSTAGE_VOLUME", "TOPOLOGY": "VOLUME_ACCESSIBILITY_CONSTRAINTS"}

// capEnums has the services with capabilities, and the numbers of their capabilities by name.
var capEnums = map[string]map[string]int32{
	"service":    csi.PluginCapability_Service_Type_value,
	"expansion":  csi.PluginCapability_VolumeExpansion_Type_value,
	"controller": csi.ControllerServiceCapability_RPC_Type_value,
	"group":      csi.GroupControllerServiceCapability_RPC_Type_value,
	"node":       csi.NodeServiceCapability_RPC_Type_value,
}

// oldCaps has names that CSI had up to version 1.12, by service. Their numbers are reserved now.
var oldCaps = map[string]map[string]int32{"controller": {"VOLUME_CONDITION": 11}, "node": {"VOLUME_CONDITION": 4}}

// capNumber returns the number of a capability of a service, by its current or former name.
func capNumber(service, name string) (n int32, known bool) {
	if n, known = capEnums[service][name]; !known {
		n, known = oldCaps[service][name]
	}
	return n, known
}

// capSets has numbers of capabilities by service, in the given order.
type capSets map[string][]int32

// parseCaps parses names of capabilities. A plain name counts for every service that has it; "node/EXPAND_VOLUME"
// counts only for the node. A number is sent unchanged, even if no version of CSI defines it: "99", "controller/99".
// The services are service (of the plugin), expansion, controller, group and node. CONTROLLER_SERVICE is implied.
func parseCaps(names ...string) (capSets, error) {
	sets := capSets{}
	for _, full := range names {
		service, name, one := strings.Cut(full, "/")
		if !one {
			service, name = "", full
		}
		if long, ok := shortCaps[name]; ok {
			name = long
		}
		if !sets.add(service, name) {
			return nil, fmt.Errorf("csifake: unknown capability %q", full)
		}
	}
	return sets, nil
}

// add adds a capability to a service, or to each service that has it if the service is empty. It returns false if there
// is none.
func (s capSets) add(service, name string) bool {
	number, notNumber := strconv.ParseInt(name, 10, 32)
	found := false
	for enum := range capEnums {
		v, known := capNumber(enum, name)
		if notNumber == nil {
			v, known = int32(number), enum != "expansion"
		}
		if !known || service != "" && service != enum {
			continue
		}
		found = true
		if !slices.Contains(s[enum], v) {
			s[enum] = append(s[enum], v)
		}
	}
	return found
}

// has reports whether the sets contain "service/NAME".
func (s capSets) has(full string) bool {
	service, name, _ := strings.Cut(full, "/")
	n, _ := capNumber(service, name)
	return slices.Contains(s[service], n)
}

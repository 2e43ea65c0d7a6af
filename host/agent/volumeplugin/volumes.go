package volumeplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/internal/display"
	"holdfast/registry"
)

func name(q request) host.VolumeName {
	return host.VolumeName{Namespace: registry.DefaultNamespace, ID: host.VolumeID(q.Name)}
}

// create creates a volume, or registers one if the volume file has an external ID. Engines repeat the request. If the
// volume is ready, it stays as it is, and other options are refused. A creation that has failed is tried again.
func (s *Server) create(r *http.Request, q request) (reply, error) {
	v, known, err := s.find(r.Context(), q)
	ready := known && v.State == registry.VolumeReady
	if err != nil || ready && len(q.Opts) == 0 {
		return reply{}, err
	}
	spec, err := s.spec(r.Context(), q)
	switch {
	case err == nil && known && spec.Plugin == "":
		err = registry.Invalid("volume %q is %s, and no plugin is set that creates it; repeat its creation with all "+
			"options; to see its state: %s", q.Name, v.State, display.Command("holdfast volume status", q.Name))
	case err == nil:
		err = s.checkPlugin(r, spec)
	}
	if err != nil {
		return reply{}, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), createLimit)
	defer cancel()
	if spec.External != "" {
		_, err = s.storage.RegisterVolume(ctx, spec)
	} else {
		_, err = s.storage.CreateVolume(ctx, spec)
	}
	if err != nil && ctx.Err() != nil {
		err = notYet("created", spec.Plugin, q, err)
	}
	return reply{}, err
}

// The limits are shorter than the times after which Docker gives up without a reason: two minutes for a creation, one
// for a removal.
const createLimit, removeLimit = 110 * time.Second, 50 * time.Second

// notYet returns the error of a request that has reached its time limit.
func notYet(what string, plugin host.PluginID, q request, err error) error {
	return registry.Errorf(registry.ErrUnavailable, "plugin %q has not %s volume %q yet, and may still do so: %w; "+
		"to see why: %s", plugin, what, q.Name, err, display.Command("holdfast volume status", q.Name))
}

// checkPlugin returns an error if the plugin of a new volume is not set, or cannot create the volume now.
func (s *Server) checkPlugin(r *http.Request, spec host.VolumeSpec) error {
	if spec.Plugin == "" {
		return registry.Invalid("volume %q does not exist, and no plugin is set that creates it; type: %s, or start "+
			"holdfast agent with --volume-default-plugin PLUGIN", spec.ID, display.Command(caller(r).Name()+
			" volume create --driver "+driver(r)+" -o plugin=PLUGIN -o size=1G", string(spec.ID)))
	}
	return s.agent.CheckEngineController(r.Context(), s.storage, spec.Plugin, spec.Node, caller(r))
}

// driver returns the name by which Docker knows the driver: that of the socket, as in holdfast.sock.
func driver(r *http.Request) string {
	at, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return display.Quote(strings.TrimSuffix(filepath.Base(at.String()), ".sock"))
}

// spec returns the volume that the options describe. Unknown options become parameters of the plugin.
func (s *Server) spec(ctx context.Context, q request) (spec host.VolumeSpec, err error) {
	opts := maps.Clone(q.Opts)
	take := func(name string) string {
		defer delete(opts, name)
		return opts[name]
	}
	if file := take("file"); file != "" {
		spec, err = s.file(ctx, file)
	} else {
		spec = host.VolumeSpec{
			Namespace: registry.DefaultNamespace, Name: q.Name, Plugin: s.defaults.Plugin, CapacityMin: s.defaults.Size,
			Capabilities: capability(registry.SingleNodeWriter),
		}
	}
	if err != nil {
		return spec, err
	}
	spec.ID = host.VolumeID(q.Name)
	if plugin := take("plugin"); plugin != "" {
		spec.Plugin = host.PluginID(plugin)
	}
	if size := take("size"); size != "" {
		bytes, err := units.RAMInBytes(size)
		if err != nil || bytes <= 0 {
			return spec, registry.Invalid("option size=%s is not a size; write it as in -o size=1G", size)
		}
		spec.CapacityMin = bytes
	}
	if fs := take("fs_type"); fs != "" {
		spec.FSType = fs
	}
	if flags := take("mount_flags"); flags != "" {
		spec.MountFlags = registry.FlagsOf(strings.Split(flags, ","))
	}
	if mode := take("access_mode"); mode != "" {
		if !slices.Contains(registry.AccessModes, registry.AccessMode(mode)) {
			return spec, registry.Invalid("option access_mode=%s is no access mode; use one of: %s", mode,
				strings.Trim(fmt.Sprint(registry.AccessModes), "[]"))
		}
		spec.Capabilities = capability(registry.AccessMode(mode))
	}
	if len(opts) > 0 && spec.Parameters == nil {
		spec.Parameters = map[string]string{}
	}
	maps.Copy(spec.Parameters, opts)
	return spec, nil
}

func capability(mode registry.AccessMode) []registry.VolumeCapability {
	return []registry.VolumeCapability{{Access: mode, Attachment: registry.FileSystem}}
}

// file reads a volume file on the agent's machine. Engines have no namespaces.
func (s *Server) file(ctx context.Context, path string) (spec host.VolumeSpec, err error) {
	if !filepath.IsAbs(path) {
		return spec, registry.Invalid("option file=%s is no absolute path", path)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return spec, registry.Invalid("option file: %w", err)
	}
	spec, _, err = s.storage.ParseVolume(ctx, host.Source{Name: path, Text: text}, host.ParseOptions{})
	if err == nil && spec.Namespace != registry.DefaultNamespace {
		err = registry.Invalid("option file=%s: the volume has namespace %q; container engines use only namespace %q",
			path, spec.Namespace, registry.DefaultNamespace)
	}
	return spec, err
}

// remove deletes a volume that Holdfast has created. If a volume was only registered, the plugin keeps it.
func (s *Server) remove(r *http.Request, q request) (reply, error) {
	ctx, cancel := context.WithTimeout(r.Context(), removeLimit)
	defer cancel()
	v, known, err := s.find(ctx, q)
	if err != nil || !known {
		return reply{}, err
	}
	deletes := v.Created || v.Made
	if deletes {
		err = s.agent.CheckEngineController(ctx, s.storage, v.Plugin, v.Node, caller(r))
	}
	if err == nil {
		err = s.agent.ForgetForEngine(ctx, s.storage, s.use(r, q))
	}
	if m := s.agent.EngineMount(v.ID); m != nil && err == nil {
		err = registry.Errorf(registry.ErrConflict, "volume %q is mounted: %s", q.Name, m.Describe())
	}
	switch {
	case err != nil:
		return reply{}, err
	case deletes:
		err = s.storage.DeleteVolume(ctx, name(q))
	default:
		err = s.storage.DeregisterVolume(ctx, name(q))
	}
	if errors.Is(err, registry.ErrNotFound) {
		err = nil
	}
	if err != nil && ctx.Err() != nil {
		err = notYet("deleted", v.Plugin, q, err)
	}
	return reply{}, err
}

// use returns the request as an argument for the agent.
func (s *Server) use(r *http.Request, q request) agent.EngineRequest {
	return agent.EngineRequest{Volume: host.VolumeID(q.Name), ID: q.ID, Caller: caller(r)}
}

func (s *Server) find(ctx context.Context, q request) (v host.VolumeStatus, known bool, err error) {
	if q.Name == "" {
		return v, false, registry.Invalid("the request names no volume")
	}
	list, _, err := s.storage.Volumes(ctx, host.VolumeQuery{Name: name(q)})
	if err != nil || len(list) == 0 {
		return v, false, err
	}
	return list[0], true, nil
}

// findExisting is find for requests that need the volume: a missing volume is an error.
func (s *Server) findExisting(ctx context.Context, q request) (host.VolumeStatus, error) {
	v, known, err := s.find(ctx, q)
	if err == nil && !known {
		err = registry.Errorf(registry.ErrNotFound, "no volume %q", q.Name)
	}
	return v, err
}

func (s *Server) list(r *http.Request, _ request) (reply, error) {
	list, _, err := s.storage.Volumes(r.Context(), host.VolumeQuery{})
	var out reply
	for _, v := range list {
		if v.Namespace == registry.DefaultNamespace && !v.Ephemeral {
			out.Volumes = append(out.Volumes, s.describe(v))
		}
	}
	return out, err
}

func (s *Server) get(r *http.Request, q request) (reply, error) {
	v, err := s.findExisting(r.Context(), q)
	if err != nil {
		return reply{}, err
	}
	d := s.describe(v)
	// An incomplete list of containers is no reason to fail.
	if ids, err := s.agent.EngineContainers(v.ID); err == nil && len(ids) > 0 {
		d.Status["containers"] = ids
	}
	return reply{Volume: &d}, nil
}

func (s *Server) describe(v host.VolumeStatus) volume {
	d := volume{Name: string(v.ID), Status: map[string]any{
		"plugin": v.Plugin, "state": v.State, "external_id": v.External,
	}}
	m := s.agent.EngineMount(v.ID)
	if m != nil {
		d.Mountpoint = m.Path
	}
	if !v.Since.IsZero() {
		d.CreatedAt = v.Since.Format(time.RFC3339)
	}
	if v.Capacity > 0 {
		d.Status["capacity"] = units.BytesSize(float64(v.Capacity))
	}
	if c := cmp.Or(v.Health.Node, v.Health.Controller); v.Health.Abnormal() {
		d.Status["health"] = c.Text()
	}
	var users []string
	for _, h := range v.Holders {
		if m != nil && m.Alloc == h.Claim.Alloc {
			users = append(users, m.Describe())
		} else {
			users = append(users, "alloc "+string(h.Claim.Alloc))
		}
	}
	if len(users) > 0 {
		d.Status["used_by"] = slices.Sorted(slices.Values(users))
	}
	return d
}

func (s *Server) path(r *http.Request, q request) (reply, error) {
	v, err := s.findExisting(r.Context(), q)
	return reply{Mountpoint: s.describe(v).Mountpoint}, err
}

// mount mounts the volume. All containers of this machine share one mount of it.
func (s *Server) mount(r *http.Request, q request) (reply, error) {
	v, err := s.findExisting(r.Context(), q)
	if err != nil {
		return reply{}, err
	}
	group, err := s.group(r.Context(), v)
	if err != nil {
		return reply{}, err
	}
	use := s.use(r, q)
	use.Plugin, use.Sealed = v.Plugin, group.Sealed
	path, answered, err := s.agent.MountForEngine(r.Context(), s.storage, use)
	return reply{Mountpoint: path, answered: func(received bool) {
		if !received {
			s.log.Warn("a container engine did not wait for a mount", "volume", use.Volume, "engine", use.Caller.Name(),
				"next", "for Podman, set volume_plugin_timeout in containers.conf")
		}
		if answered != nil {
			answered(received)
		}
	}}, err
}

func (s *Server) unmount(r *http.Request, q request) (reply, error) {
	answered, err := s.agent.UnmountForEngine(r.Context(), s.storage, s.use(r, q))
	return reply{answered: answered}, err
}

package volumeplugin

import (
	"context"
	"errors"

	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/docker/go-units"

	"holdfast/host"
	"holdfast/registry"
)

func name(q request) host.VolumeName {
	return host.VolumeName{Namespace: registry.DefaultNamespace, ID: host.VolumeID(q.Name)}
}

// create creates a volume. One that exists is left as it is, because engines repeat the request.
func (s *Server) create(r *http.Request, q request) (reply, error) {
	_, known, err := s.find(r.Context(), q)
	if err != nil || known && len(q.Opts) == 0 {
		return reply{}, err
	}
	spec, err := s.spec(r.Context(), q)
	if err == nil {
		_, err = s.storage.CreateVolume(r.Context(), spec)
	}
	return reply{}, err
}

// spec returns the volume that the options describe. Options that have no other meaning are parameters of the plugin.
func (s *Server) spec(ctx context.Context, q request) (host.VolumeSpec, error) {
	spec := host.VolumeSpec{
		Namespace: registry.DefaultNamespace, ID: host.VolumeID(q.Name), Name: q.Name, Plugin: s.defaults.Plugin,
		CapacityMin: s.defaults.Size,
		Capabilities: []registry.VolumeCapability{
			{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem},
		},
	}
	opts := maps.Clone(q.Opts)
	take := func(name string) string {
		defer delete(opts, name)
		return opts[name]
	}
	if file := take("file"); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return spec, registry.Invalid("option file: %w", err)
		}
		if spec, _, err = s.storage.ParseVolume(ctx, host.Source{Name: file, Text: text}, host.ParseOptions{}); err != nil {
			return spec, err
		}
		spec.ID = host.VolumeID(q.Name)
	}
	if plugin := take("plugin"); plugin != "" {
		spec.Plugin = host.PluginID(plugin)
	}
	if size := take("size"); size != "" {
		bytes, err := units.RAMInBytes(size)
		if err != nil || bytes <= 0 {
			return spec, registry.Invalid("option size=%s is no size; write it as in -o size=1G", size)
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
		spec.Capabilities[0].Access = registry.AccessMode(mode)
	}
	if spec.Plugin == "" {
		return spec, registry.Invalid("which plugin is to create volume %q is not known; type: "+
			"docker volume create -d holdfast -o plugin=PLUGIN -o size=1G %s, or start holdfast agent with "+
			"--volume-default-plugin",
			q.Name, q.Name)
	}
	if len(opts) > 0 && spec.Parameters == nil {
		spec.Parameters = map[string]string{}
	}
	maps.Copy(spec.Parameters, opts)
	return spec, nil
}

// remove deletes a volume that Holdfast has created. The plugin keeps one that was only registered.
func (s *Server) remove(r *http.Request, q request) (reply, error) {
	v, known, err := s.find(r.Context(), q)
	switch {
	case err != nil || !known:
		return reply{}, err
	case s.agent.EngineUses(v.ID):
		return reply{}, registry.Errorf(registry.ErrConflict, "volume %q is mounted", q.Name)
	case v.Created || v.Made:
		err = s.storage.DeleteVolume(r.Context(), name(q))
	default:
		err = s.storage.DeregisterVolume(r.Context(), name(q))
	}
	if errors.Is(err, registry.ErrNotFound) {
		err = nil
	}
	return reply{}, err
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

// must is find for requests that need the volume.
func (s *Server) must(ctx context.Context, q request) (host.VolumeStatus, error) {
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
	v, err := s.must(r.Context(), q)
	if err != nil {
		return reply{}, err
	}
	d := s.describe(v)
	return reply{Volume: &d}, nil
}

func (s *Server) describe(v host.VolumeStatus) volume {
	d := volume{Name: string(v.ID), Mountpoint: s.agent.EnginePath(v.ID), Status: map[string]any{
		"plugin": v.Plugin, "state": v.State, "external_id": v.External,
	}}
	if !v.Since.IsZero() {
		d.CreatedAt = v.Since.Format(time.RFC3339)
	}
	if v.Capacity > 0 {
		d.Status["capacity"] = units.BytesSize(float64(v.Capacity))
	}
	var holders []string
	for _, h := range v.Holders {
		holders = append(holders, "alloc "+string(h.Claim.Alloc))
	}
	if len(holders) > 0 {
		d.Status["used_by"] = slices.Sorted(slices.Values(holders))
	}
	return d
}

func (s *Server) path(r *http.Request, q request) (reply, error) {
	_, err := s.must(r.Context(), q)
	return reply{Mountpoint: s.agent.EnginePath(host.VolumeID(q.Name))}, err
}

// mount mounts the volume, which has one mount for all containers of this machine.
func (s *Server) mount(r *http.Request, q request) (reply, error) {
	v, err := s.must(r.Context(), q)
	if err != nil {
		return reply{}, err
	}
	group, err := s.group(r.Context(), v)
	if err != nil {
		return reply{}, err
	}
	path, err := s.agent.MountForEngine(r.Context(), s.storage, v.ID, group.Sealed, q.ID, caller(r))
	return reply{Mountpoint: path}, err
}

func (s *Server) unmount(r *http.Request, q request) (reply, error) {
	return reply{}, s.agent.UnmountForEngine(r.Context(), s.storage, host.VolumeID(q.Name), q.ID, caller(r))
}

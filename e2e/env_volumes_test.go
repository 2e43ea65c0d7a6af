package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// Access modes.
const (
	oneWriter   = "single-node-writer"
	manyWriters = "multi-node-multi-writer"
)

func volumeName(id string) host.VolumeName {
	return host.VolumeName{Namespace: "default", ID: host.VolumeID(id)}
}

// volumeText is the file of a volume of the plugin, whose name is its id. more is further lines.
func volumeText(plugin, id, more string) string {
	return fmt.Sprintf("id = %q\nname = %q\ntype = \"csi\"\nplugin_id = %q\ncapacity_min = \"1MiB\"\n", id, id,
		plugin) +
		capability(oneWriter, "file-system") + capability(manyWriters, "file-system") + more
}

func capability(access, attachment string) string {
	return fmt.Sprintf("capability {\n access_mode = %q\n attachment_mode = %q\n}\n", access, attachment)
}

func parseVolume(ctx context.Context, h *host.Host, text string) (host.VolumeSpec, error) {
	spec, _, err := h.ParseVolume(ctx, host.Source{Name: "volume.hcl", Text: []byte(text)}, host.ParseOptions{})
	return spec, err
}

func (e *env) create(id string) error { return e.createWith(e.ctx(), id, "") }

// createWith creates a volume with further lines in its file.
func (e *env) createWith(ctx context.Context, id, more string) error {
	return createText(ctx, e.host, volumeText("fake", id, more))
}

func createText(ctx context.Context, h *host.Host, text string) error {
	spec, err := parseVolume(ctx, h, text)
	if err != nil {
		return err
	}
	return errOf(h.CreateVolume(ctx, spec))
}

func (e *env) delete(id string) error { return e.host.DeleteVolume(e.ctx(), volumeName(id)) }

func (e *env) release(alloc string) error { return e.host.ReleaseAlloc(e.ctx(), host.AllocID(alloc)) }

// volumeStates returns the state of each volume.
func (e *env) volumeStates() map[string]string {
	e.t.Helper()
	list, _, err := e.host.Volumes(e.ctx(), host.VolumeQuery{})
	e.must(err)
	states := map[string]string{}
	for _, v := range list {
		states[string(v.ID)] = string(v.State)
	}
	return states
}

// request is a volume block of a group.
type request struct {
	name   string // empty: data
	source string // empty: lines say which volume it is
	mode   string // empty: oneWriter
	block  bool   // a block device, not a file system
	lines  string // further lines
}

func (r request) label() string { return or(r.name, "data") }

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

func (r request) text() string {
	attachment := "file-system"
	if r.block {
		attachment = "block-device"
	}
	text := fmt.Sprintf("volume %q {\n type = \"csi\"\n access_mode = %q\n attachment_mode = %q\n",
		r.label(), or(r.mode, oneWriter), attachment)
	if r.source != "" {
		text += fmt.Sprintf(" source = %q\n", r.source)
	}
	return text + r.lines + "\n}\n"
}

// mountOptions is a mount_options block.
func mountOptions(fs, group string, flags ...string) string {
	lines := "mount_options {\n"
	if fs != "" {
		lines += fmt.Sprintf(" fs_type = %q\n", fs)
	}
	if group != "" {
		lines += fmt.Sprintf(" mount_group = %q\n", group)
	}
	if len(flags) > 0 {
		lines += fmt.Sprintf(" mount_flags = [\"%s\"]\n", strings.Join(flags, `", "`))
	}
	return lines + "}"
}

// groupText is a job with one task that mounts the volumes.
func groupText(requests ...request) string {
	var blocks, mounts strings.Builder
	for _, r := range requests {
		blocks.WriteString(r.text())
		fmt.Fprintf(&mounts, "volume_mount {\n volume = %q\n destination = \"/%s\"\n}\n", r.label(), r.label())
	}
	return fmt.Sprintf("job \"user\" {\n group \"g\" {\n%s task \"t\" {\n driver = \"raw_exec\"\n%s}\n}\n}\n", &blocks,
		&mounts)
}

func parseGroup(ctx context.Context, h *host.Host, alloc, text string) (host.AllocGroup, error) {
	job, _, err := h.Parse(ctx, host.Source{Name: "user.hcl", Text: []byte(text)}, host.ParseOptions{})
	if err != nil {
		return host.AllocGroup{}, fmt.Errorf("%w\n%s", err, text)
	}
	return host.AllocGroup{
		Alloc: host.AllocID(alloc), Job: "user", Group: "g", Namespace: "default", Sealed: job.Groups[0].Sealed,
	}, nil
}

// group returns an alloc that requests volumes. Each is parsed again, so that no two allocs share memory.
func (e *env) group(alloc string, requests ...request) host.AllocGroup {
	e.t.Helper()
	g, err := parseGroup(e.ctx(), e.host, alloc, groupText(requests...))
	e.must(err)
	return g
}

// prepareAll returns the paths of the alloc's volumes on the host, by the labels of the requests in capital letters.
func (e *env) prepareAll(ctx context.Context, g host.AllocGroup) (map[string]string, error) {
	plans, err := e.host.PrepareAlloc(ctx, g)
	if err != nil {
		return nil, err
	}
	paths := map[string]string{}
	for _, v := range plans["t"].Env {
		if name, found := strings.CutPrefix(v.Name, "HOLDFAST_VOLUME_"); found {
			paths[name] = v.Value
		}
	}
	return paths, nil
}

// prepare returns the path of the alloc's volume with the label data.
func (e *env) prepare(g host.AllocGroup) (string, error) {
	paths, err := e.prepareAll(e.ctx(), g)
	if err == nil && paths["DATA"] == "" {
		err = fmt.Errorf("the plan has no path: %v", paths)
	}
	return paths["DATA"], err
}

// use prepares an alloc that requests one volume, and returns its path.
func (e *env) use(alloc string, r request) string {
	e.t.Helper()
	paths, err := e.prepareAll(e.ctx(), e.group(alloc, r))
	e.must(err)
	return paths[strings.ToUpper(r.label())]
}

// claims returns the claims that are held, by alloc.
func (e *env) claims() map[string]host.Claim {
	e.t.Helper()
	list, _, err := e.host.Claims(e.ctx(), host.ClaimQuery{})
	e.must(err)
	held := map[string]host.Claim{}
	for _, c := range list {
		held[string(c.Alloc)] = c
	}
	return held
}

// waitReleased waits until no record of the alloc is left.
func (e *env) waitReleased(alloc string) {
	e.t.Helper()
	e.waitUntil(alloc+" is released", func() bool {
		list, _, err := e.host.Allocs(e.ctx(), host.AllocQuery{ID: host.AllocID(alloc)})
		return err == nil && len(list) == 0
	})
	if c, held := e.claims()[alloc]; held {
		e.t.Errorf("%s is released and holds %s", alloc, c.Name)
	}
}

func (e *env) writeFile(path, name, text string) {
	e.t.Helper()
	e.must(os.WriteFile(filepath.Join(path, name), []byte(text), 0o600))
}

// wantFile fails the test unless a file of a volume has this content.
func (e *env) wantFile(path, name, text string) {
	e.t.Helper()
	if got, err := os.ReadFile(filepath.Join(path, name)); err != nil || string(got) != text {
		e.t.Errorf("%s of %s is %q, %v; want %q", name, path, got, err, text)
	}
}

// scenario is the whole life of the volume "vol". It is expanded while in use if its plugin can.
func (e *env) scenario() error {
	if err := e.create("vol"); err != nil {
		return err
	}
	path, err := e.prepare(e.group("alloc-1", request{source: "vol"}))
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(path, "f"), []byte("x"), 0o600); err != nil {
		return err
	}
	if slices.Contains(e.caps, "EXPAND_VOLUME") {
		if err := expand(e.ctx(), e.host, volumeName("vol"), 2<<20); err != nil {
			return err
		}
	}
	if slices.Contains(e.caps, "MODIFY_VOLUME") {
		if err := modify(e.ctx(), e.host, volumeName("vol"), map[string]string{"tier": "gold"}); err != nil {
			return err
		}
	}
	if slices.Contains(e.caps, "CREATE_DELETE_SNAPSHOT") {
		spec := host.SnapshotSpec{Namespace: "default", ID: "snap", Volume: "vol"}
		if _, err := e.host.CreateSnapshot(e.ctx(), spec); err != nil {
			return err
		}
		if err := e.host.DeleteSnapshot(e.ctx(), spec.SnapshotName()); err != nil {
			return err
		}
	}
	if slices.Contains(e.caps, "GROUP_CONTROLLER_SERVICE") {
		spec := host.SnapshotSpec{Namespace: "default", ID: "group", Volumes: []host.VolumeID{"vol"}}
		if _, err := e.host.CreateGroupSnapshot(e.ctx(), spec); err != nil {
			return err
		}
		if err := e.host.DeleteGroupSnapshot(e.ctx(), spec.SnapshotName()); err != nil {
			return err
		}
	}
	if err := e.release("alloc-1"); err != nil {
		return err
	}
	return e.delete("vol")
}

// jobScenario is the life of a volume that a job's create block makes, that volume update changes, and that goes with
// its alloc.
func (e *env) jobScenario() error {
	create := "create {\n plugin_id = \"fake\"\n on_stop = \"delete\"\n secrets = { token = { env = \"HOME\" } }\n}\n"
	if _, err := e.prepare(e.group("alloc-1", request{source: "vol", lines: create})); err != nil {
		return err
	}
	list, _, err := e.host.Volumes(e.ctx(), host.VolumeQuery{Name: volumeName("vol")})
	if err != nil || len(list) != 1 {
		return fmt.Errorf("the create block made %+v: %w", list, err)
	}
	spec := list[0].VolumeSpec
	spec.Secrets = map[string]registry.Secret{"token": {Env: "PATH"}}
	spec.Mutable = map[string]string{"tier": "gold"}
	done, err := e.host.UpdateVolume(e.ctx(), spec, false)
	if err == nil && (done.Volume.Mutable["tier"] != "gold" || done.Volume.Secrets["token"].Env != "PATH") {
		err = fmt.Errorf("the volume was updated to %+v", done.Volume)
	}
	if err = errors.Join(err, e.release("alloc-1")); err != nil {
		return err
	}
	e.waitUntil("the volume is deleted", func() bool {
		list, _, err := e.host.Volumes(e.ctx(), host.VolumeQuery{Name: volumeName("vol")})
		return err == nil && len(list) == 0
	})
	return nil
}

// adoptScenario adopts a volume that was deregistered. The calls change nothing at the plugin: if it dies, the caller
// adopts the volume again.
func (e *env) adoptScenario() error {
	if err := errors.Join(e.create("vol"), e.host.DeregisterVolume(e.ctx(), volumeName("vol"))); err != nil {
		return err
	}
	spec, err := parseVolume(e.ctx(), e.host, volumeText("fake", "vol", ""))
	if err != nil {
		return err
	}
	spec.External = registry.ExternalID(csifake.VolumeID("vol"))
	v, err := e.host.AdoptVolume(e.ctx(), spec)
	for errors.Is(err, registry.ErrUnavailable) {
		v, err = e.host.AdoptVolume(e.ctx(), spec)
	}
	if err == nil && (v.State != registry.VolumeReady || v.Capacity == 0) {
		err = fmt.Errorf("the volume was adopted as %+v", v.Volume)
	}
	return errors.Join(err, e.delete("vol"))
}

// expand expands a volume in use, and returns an error unless it has the size on its node, too.
func expand(ctx context.Context, h *host.Host, name host.VolumeName, size int64) error {
	v, err := h.ExpandVolume(ctx, name, host.CapacityRange{Required: size})
	if err == nil && (v.Capacity != size || v.Expansion.Pending()) {
		err = fmt.Errorf("expanded to %d bytes: %+v", v.Capacity, v.Expansion)
	}
	return err
}

// modify changes mutable parameters, and returns an error unless the volume has them.
func modify(ctx context.Context, h *host.Host, name host.VolumeName, parameters map[string]string) error {
	v, err := h.ModifyVolume(ctx, name, parameters)
	if err == nil && (!maps.Equal(v.Mutable, parameters) || v.Modification.Open()) {
		err = fmt.Errorf("modified to %v: %+v", v.Mutable, v.Modification)
	}
	return err
}

// lifeCycle creates a volume, has the alloc use it, and deletes it.
func (e *env) lifeCycle(ctx context.Context, volume string, g host.AllocGroup, lines string) error {
	if err := e.createWith(ctx, volume, lines); err != nil {
		return err
	}
	if _, err := e.prepareAll(ctx, g); err != nil {
		return err
	}
	if err := e.host.ReleaseAlloc(ctx, g.Alloc); err != nil {
		return err
	}
	return e.host.DeleteVolume(ctx, volumeName(volume))
}

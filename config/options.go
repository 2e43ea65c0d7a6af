package config

import (
	"regexp"
	"strconv"
	"strings"

	"holdfast/registry"
)

// maxMap bounds a map or a list of mount flags in a CSI call, in bytes (CSI "Size Limits").
const maxMap = 4096

var optionsStanza = &stanza{
	name: "mount_options",
	doc:  "How a file system is mounted. The options of a job take precedence over those of the volume.",
	fields: []field{
		{name: "fs_type", kind: isText, doc: "The type of the file system, such as ext4."},
		{name: "mount_flags", kind: isStrings, doc: "Options of mount(8), such as noatime."},
		{name: "mount_group", kind: isText,
			doc: "The group that owns the volume: a number, or a name that the plugin's machine knows. The plugin " +
				"must support it."},
		{name: "owner", kind: isText, doc: "The number of the user that owns the files. Owner, group and mode are " +
			"set once, before the first use of an empty volume."},
		{name: "group", kind: isText, doc: "The number of their group. Without owner and mode it is the same as " +
			"mount_group if the plugin supports that."},
		{name: "mode", kind: isText, doc: "The permissions of the root directory, in octal, such as `\"0770\"`."},
		{name: "ownership", kind: isChoice, words: []string{"root", "recursive"}, fallback: "root",
			doc: "With root, owner and group are set on the root directory, if the volume is empty. With recursive, " +
				"they are set on all files, also of a volume that is not empty. Then allocs that write to it at the " +
				"same time have to set the same owner, group and mode."},
	},
}

// mountOptions reads a mount_options block, of a job or of a volume file, into u.
func (d *decoder) mountOptions(b block, u *registry.Usage) {
	in := d.open(b, optionsStanza)
	u.FSType = in.text("fs_type")
	if len(u.FSType) > 128 || strings.ContainsFunc(u.FSType, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		d.errorf(in.rangeOf("fs_type"), `use the name of a file system, as in "ext4"`, "fs_type %q is not a name",
			u.FSType)
	}
	u.MountFlags = in.flags("mount_flags")
	if len(u.MountFlags) > maxMap {
		d.errorf(in.rangeOf("mount_flags"), "use fewer", "mount_flags has %d bytes; CSI allows %d", len(u.MountFlags),
			maxMap)
	}
	u.MountGroup = in.text("mount_group")
	if wrong := wrongGroup(u.MountGroup); wrong != "" {
		d.errorf(in.rangeOf("mount_group"), `use a number, as in "1000", or a name that the plugin's machine knows`,
			"mount_group %s", wrong)
	}
	u.Ownership = d.ownership(in, u.MountGroup)
}

// ownership reads owner, group and mode.
func (d *decoder) ownership(in *fields, mountGroup string) (o registry.Ownership) {
	o.Owner, o.Group = in.number("owner"), in.number("group")
	o.Mode = in.text("mode")
	if o.Mode != "" && !octalMode.MatchString(o.Mode) {
		d.errorf(in.rangeOf("mode"), `write it in octal, as in "0770"`, "mode %q is not a file mode", o.Mode)
	}
	if o.Group != "" && mountGroup != "" {
		d.errorf(in.rangeOf("group"), "keep one of them", "group and mount_group exclude each other")
	}
	o.Recursive = oneOf[string](in, "ownership") == "recursive"
	if o.Recursive && o.Owner == "" && o.Group == "" && !d.unsure(in.block) {
		d.errorf(in.rangeOf("ownership"), "add owner or group", "ownership has no owner and no group to set")
	}
	return o
}

var octalMode = regexp.MustCompile(`^0?[0-7]{3,4}$`)

// number reads the number of a user or group.
func (f *fields) number(name string) string {
	s := f.text(name)
	if wrong := wrongGroup(s); wrong != "" || groupName.MatchString(s) {
		f.errorf(f.rangeOf(name), `write the number, as in "1000": the names of a task are not known here`,
			"%s %q is not a number", name, s)
	}
	return s
}

// groupName matches names that useradd(8) accepts and that a mount command parses as one option.
var groupName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9._-]{0,126}\$?$`)

// wrongGroup returns why s is not a valid group, or an empty string.
func wrongGroup(s string) string {
	if s == "" || groupName.MatchString(s) {
		return ""
	}
	switch n, err := strconv.ParseUint(s, 10, 32); {
	case err != nil || strconv.FormatUint(n, 10) != s:
		return "is neither the number nor the name of a group"
	case n == 1<<32-1:
		return "cannot be 4294967295: that number means no group"
	}
	return ""
}

// checkSize reports a map that exceeds the size limit of CSI.
func (d *decoder) checkSize(in *fields, name string, m map[string]string) {
	size := 0
	for key, value := range m {
		size += len(key) + len(value)
	}
	if size > maxMap {
		d.errorf(in.mapRange(name), "shorten it, or give the plugin the name of a file instead",
			"%s has %d bytes; CSI allows %d", name, size, maxMap)
	}
}

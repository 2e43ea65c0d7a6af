# A volume with a file system and mount flags. They hold for every job that gives no mount options of its own.

id           = "archive"
type         = "csi"
plugin_id    = "loopfs"
capacity_min = "32MiB"
capacity_max = "64MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

mount_options {
  fs_type     = "ext4"
  mount_flags = ["noexec"]
}

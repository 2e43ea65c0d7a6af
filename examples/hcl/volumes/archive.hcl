# A volume with the file system xfs, made by loopfs. Its mount options hold for every job that gives none of its own. No xfs is smaller
# than 300 MiB.

id           = "archive"
type         = "csi"
plugin_id    = "loopfs"
capacity_min = "300MiB"
capacity_max = "320MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

mount_options {
  fs_type     = "xfs"
  mount_flags = ["noatime"]
}

id           = "../v"
type         = "csi"
plugin       = "p"
external_id  = "/etc/passwd"
snapshot_id  = "s"
clone_id     = "c"
capacity_min = "10 GigaBytes"
capacity_max = "99999999999999 EiB"
capability {
  access_mode = "single-node-write"
}
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
mount_options {
  fs_type     = "ext 4"
  mount_flags = "noatime"
}
topology_request {
  requird {}
  preferred {
    topology {}
  }
}
parameters {
  list = ["a"]
  twice = 1
  twice = 2
}
namespace = ["a", "b"]

id           = "full"
namespace    = "prod"
name         = "shown"
type         = "csi"
plugin_id    = "p"
clone_id     = "other"
capacity_min = 1073741824
capacity_max = "1.5 GiB"
capability {
  access_mode     = "multi-node-single-writer"
  attachment_mode = "file-system"
}
capability {
  access_mode     = "single-node-multi-writer"
  attachment_mode = "block-device"
}
mount_options {
  fs_type     = "xfs"
  mount_flags = ["noatime", "x=y,z"]
}
topology_request {
  required {
    topology {
      segments { "topology.example.com/zone" = "a", rack = "r1" }
    }
  }
  preferred {
    topology { segments { rack = "r2" } }
  }
}
secrets = {
  user     = { env = "U" }
  password = { file = "/run/p" }
}
parameters {
  "quoted/key" = "v"
  number       = 3
  truth        = true
  subDir       = "${pvc.metadata.name}/x"
}
context = {
  server = "s"
}
mutable_parameters {
  tier = "gold"
}

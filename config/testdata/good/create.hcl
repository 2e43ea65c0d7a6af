variable "zone" { default = "a" }
job "db" {
  group "db" {
    count = 2
    volume "data" {
      type            = "csi"
      source          = "data"
      per_alloc       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      create {
        plugin_id    = "ssd"
        capacity_min = "1GiB"
        capacity_max = "2GiB"
        clone_id     = "data"
        on_stop      = "delete"
        parameters { tier = "fast" }
        secrets {
          token = { env = "TOKEN" }
          key   = { file = "/run/key" }
          lock  = { callback = "lock" }
        }
        topology_request {
          required {
            topology {
              segments { zone = var.zone }
            }
          }
          preferred {
            topology {
              segments { zone = "b" }
            }
          }
        }
      }
    }
    volume "restored" {
      type            = "csi"
      source          = "restored"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
      create {
        plugin_id   = "ssd"
        snapshot_id = "nightly"
        name        = "restored-from-nightly"
        mutable_parameters { iops = 3000 }
      }
    }
    volume "copied" {
      type            = "csi"
      source          = "copied"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
      create {
        plugin_id         = "ssd"
        clone_external_id = "vol-1"
        on_stop           = "keep"
      }
    }
    task "t" { driver = "exec" }
  }
}

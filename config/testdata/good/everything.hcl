# Names of Nomad's blocks at every level: all of them are carried.
job "everything" {
  region      = "global"
  all_at_once = false
  periodic {
    crons            = ["*/15 * * * *"]
    prohibit_overlap = true
  }
  multiregion {
    strategy { max_parallel = 1 }
    region "west" { count = 2 }
  }
  spread {
    attribute = "${node.datacenter}"
    target "dc1" { percent = 60 }
  }
  reschedule { unlimited = true }
  migrate { max_parallel = 1 }
  ui { description = "x" }
  vault { role = "r" }
  type = "batch"
  group "g" {
    consul { namespace = "n" }
    scaling {
      enabled = true
      policy { cooldown = "1m" }
    }
    disconnect { lost_after = "1h" }
    prevent_reschedule_on_lost = true
    network {
      mode = "bridge"
      dns { servers = ["192.0.2.1"] }
      port "a" {}
      port "b" { static = 80 }
    }
    service {
      name = "s"
      connect {
        sidecar_service {
          proxy {
            upstreams {
              destination_name = "db"
              local_bind_port  = 5432
            }
            upstreams {
              destination_name = "cache"
              local_bind_port  = 6379
            }
          }
        }
      }
    }
    task "t" {
      driver = "raw_exec"
      kind   = "x"
      artifact {
        source = "https://example.net/x.tar.gz"
        options { checksum = "sha256:00" }
        headers { X-Token = "t" }
      }
      identity {
        name = "id"
        aud  = ["a"]
      }
      action "restart" { command = "/bin/true" }
      dispatch_payload { file = "in" }
      schedule {
        cron { start = "0 0 * * *" }
      }
      secret "s" { provider = "nomad" }
      resources {
        device "nvidia/gpu" {
          count = 1
          constraint {
            attribute = "${device.attr.memory}"
            operator  = ">="
            value     = "2 GiB"
          }
        }
        numa { affinity = "prefer" }
        network {
          mbits = 10
          port "old" {}
        }
      }
    }
  }
}

# A cloud disk from a snapshot, in one of two racks, preferably the first.

id           = "archive"
type         = "csi"
plugin_id    = "cloud-disks"
snapshot_id  = "snap-0042"
capacity_min = "100GB"

capability {
  access_mode     = "single-node-reader-only"
  attachment_mode = "file-system"
}

topology_request {
  required {
    topology { segments { "rack" = "R1", "zone" = "eu-1a" } }
    topology { segments { "rack" = "R2" } }
  }

  preferred {
    topology {
      segments {
        rack = "R1"
        zone = "eu-1a"
      }
    }
  }
}

parameters {
  type = "ssd"
  iops = 3000
}

    id        = "zoned[0]" # of a volume per alloc
    plugin_id = "pd.example.com"
    capacity_min = "10 MiB"
    capacity_max = "1.5Gib"
    capability {
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }
    mount_options {
      fs_type     = "xfs"
      mount_flags = ["noatime",]
    }
    parameters {
      replication-type = "regional" # as "${node.unique.name}" is not meant
    }
    topology_request {
      required {
        topology { segments {rack = "R1"} }
        topology { segments {rack = "R2", zone = "a"} }
      }
      preferred {
        topology { 
          segments { 
            "topology.example.com/zone" = "a"
          }
          segments {
            "topology.example.com/zone" = "b"
          }
          segments {
            zone = "c"
            rack = 7
          }
        }
      }
    }

job "db" {
  group "db" {
    volume "inline" {
      type = "csi"
      ephemeral { plugin_id = "ssd" }
      create { plugin_id = "ssd" }
    }
    volume "wrong" {
      type            = "csi"
      source          = "data"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      create {
        capacity_min = "2GiB"
        capacity_max = "1GiB"
        clone_id     = "data"
        snapshot_id  = "s"
        on_stop      = "detach"
        external_id  = "x"
        secrets { token = "hunter2" }
        parameters { alloc = "${NOMAD_ALLOC_ID}" }
      }
    }
    volume "alike" {
      type            = "csi"
      source          = "alike"
      per_alloc       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      create {
        plugin_id = "ssd"
        name      = "alike"
      }
    }
    task "t" { driver = "exec" }
  }
}

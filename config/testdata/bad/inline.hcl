job "inline" {
  group "g" {
    volume "nothing" {
      type = "csi"
      ephemeral {}
    }
    volume "both" {
      type      = "csi"
      source    = "s"
      per_alloc = true
      sticky    = true
      ephemeral { plugin_id = "no such" }
    }
    volume "nodes" {
      type        = "csi"
      access_mode = "multi-node-multi-writer"
      ephemeral { plugin_id = "p" }
    }
    volume "reader" {
      type        = "csi"
      access_mode = "single-node-reader-only"
      ephemeral { plugin_id = "p" }
    }
    volume "run-time" {
      type = "csi"
      ephemeral {
        plugin_id = "${node.class}"
        context {
          alloc = "id-${NOMAD_ALLOC_ID}"
          "a/b" = attr.kernel.name
          list  = ["a"]
          fine  = "$${NOMAD_ALLOC_ID}"
        }
      }
    }
    volume "attribute" {
      type = "csi"
      ephemeral {
        plugin_id = "p"
        context   = { (NOMAD_TASK_NAME) = "x", y = "${NOMAD_REGION}" }
      }
    }
    task "t" { driver = "exec" }
  }
}

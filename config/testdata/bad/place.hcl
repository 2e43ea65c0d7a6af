job "x" {
  csi_plugin {
    id = "a"
  }
  group "g" {
    driver = "exec"
    csi_plugin = {}
    task "t" {
      driver = "exec"
      count = 2
      csi_plugin = { id = "a" }
      driver {}
    }
  }
}

job "x" {
  datacentres = ["dc1"]
  grup "g" {}
  group "g" {
    coutn = 2
    voluem "v" {}
    task "t" {
      drivr = "exec"
      csi_plugn {
        id = "p"
      }
    }
  }
}

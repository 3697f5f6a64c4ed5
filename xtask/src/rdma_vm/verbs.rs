//! What the installed header says about the structures that the engine uses.
//!
//! Owns: a C program, made of the list below, that prints offsets and sizes.
//! **Invariant:** the numbers are the C compiler's, of the same package whose library the guest loads.

use std::{fs, path::PathBuf};

use super::packages::Root;
use crate::{
    shell::{Failure, Shell, fail},
    workspace::Workspace,
};

/// `struct: field field …`; a `*` in front asks for the size, too.
const ASKED: &str = "
*ibv_context_ops: poll_cq req_notify_cq post_send
ibv_context: ops num_comp_vectors
ibv_mr: lkey rkey
ibv_comp_channel: fd
ibv_cq: context cqe
ibv_qp: context qp_num
*ibv_device_attr: fw_ver max_mr_size max_qp_wr max_sge max_sge_rd max_cqe max_qp_rd_atom \
  max_qp_init_rd_atom phys_port_cnt
*ibv_port_attr: state active_mtu gid_tbl_len max_msg_sz lid link_layer
*ibv_qp_cap: max_send_wr max_send_sge max_inline_data
*ibv_qp_init_attr: send_cq recv_cq srq cap qp_type sq_sig_all
*ibv_ah_attr: grh.dgid grh.sgid_index grh.hop_limit grh.traffic_class dlid sl is_global port_num
*ibv_qp_attr: qp_state path_mtu rq_psn sq_psn dest_qp_num qp_access_flags ah_attr pkey_index \
  max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt rnr_retry
*ibv_sge: addr length lkey
*ibv_send_wr: wr_id next sg_list num_sge opcode send_flags wr.rdma.remote_addr wr.rdma.rkey
*ibv_wc: wr_id status vendor_err qp_num
";
/// Constants, by the names the engine's source has for them.
const CONSTANTS: &str = "
ACCESS_LOCAL_WRITE ACCESS_REMOTE_WRITE ACCESS_REMOTE_READ PORT_ACTIVE QPT_RC QPS_INIT QPS_RTR QPS_RTS
QPS_ERR QP_STATE QP_ACCESS_FLAGS QP_PKEY_INDEX QP_PORT QP_AV QP_PATH_MTU QP_TIMEOUT QP_RETRY_CNT
QP_RNR_RETRY QP_RQ_PSN QP_MAX_QP_RD_ATOMIC QP_MIN_RNR_TIMER QP_SQ_PSN QP_MAX_DEST_RD_ATOMIC
QP_DEST_QPN WR_RDMA_WRITE WR_RDMA_READ SEND_SIGNALED SEND_INLINE WC_SUCCESS WC_WR_FLUSH_ERR
WC_REM_ACCESS_ERR WC_RETRY_EXC_ERR WC_RNR_RETRY_EXC_ERR WC_RESP_TIMEOUT_ERR
";

/// Lines of `struct.field offset`, `struct size` and `CONSTANT value`.
pub(super) fn layout(root: &Root, workspace: &Workspace) -> Result<Vec<u8>, Failure> {
    let (source, program) = (root.work.join("layout.c"), root.work.join("layout"));
    fs::write(&source, text())
        .map_err(|error| Failure::new(format!("{}: {error}", source.display())))?;
    let include = root.root.join("usr/include");
    let arguments: [PathBuf; 4] = ["-I".into(), include, "-o".into(), program.clone()];
    Shell::program("cc")
        .args(&arguments.map(|part| part.to_string_lossy().into_owned()))
        .args(&[source.to_string_lossy()])
        .dir(workspace.root())
        .run()?;
    match Shell::program(program).quiet() {
        Some(said) => Ok(said.into_bytes()),
        None => fail("the program that prints the header's layout failed"),
    }
}

fn text() -> String {
    let mut out = String::from(
        "#include <stddef.h>\n#include <stdio.h>\n#include <infiniband/verbs.h>\nint main(void) {\n",
    );
    let mut say = |name: &str, number: &str| {
        out.push_str(&format!("  printf(\"{name} %zu\\n\", (size_t)({number}));\n"));
    };
    for line in ASKED.lines() {
        let Some((name, fields)) = line.split_once(':') else { continue };
        let (size, name) = match name.strip_prefix('*') {
            Some(name) => (true, name),
            None => (false, name),
        };
        for field in fields.split_whitespace() {
            say(&format!("{name}.{field}"), &format!("offsetof(struct {name}, {field})"));
        }
        if size {
            say(name, &format!("sizeof(struct {name})"));
        }
    }
    for name in CONSTANTS.split_whitespace() {
        say(name, &format!("IBV_{name}"));
    }
    out.push_str("  return 0;\n}\n");
    out
}

#[cfg(test)]
mod tests {
    use super::text;

    #[test]
    fn every_line_asks_for_something() {
        let text = text();
        assert!(
            text.contains("\"ibv_qp.qp_num %zu\\n\", (size_t)(offsetof(struct ibv_qp, qp_num))")
        );
        assert!(text.contains("\"ibv_wc %zu\\n\", (size_t)(sizeof(struct ibv_wc))"));
        assert!(text.contains("\"QPS_RTS %zu\\n\", (size_t)(IBV_QPS_RTS)"));
        assert!(!text.contains("sizeof(struct ibv_qp)"), "its size is the library's affair");
    }
}
